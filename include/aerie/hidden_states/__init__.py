"""Hidden states of the corpus: forecast, capture inside the server, verification."""
