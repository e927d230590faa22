"""Low-rank factors of matrices and of products of factors."""
