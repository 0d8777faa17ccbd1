"""Which positions each rank holds: layouts, shards of batches, documents, whole sequences again."""
