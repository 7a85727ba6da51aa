"""What reads finished runs: reports and studies."""
