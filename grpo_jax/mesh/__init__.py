"""Where arrays lie: meshes, shardings, shards, chips."""
