"""What several operations share: batches with masks, block rows, tiles of a sparse matrix."""
