"""One update: log-probabilities, loss, gradient, optimizer, measurements."""
