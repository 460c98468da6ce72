"""A store in a bucket: S3, Google Cloud Storage, Azure, through obstore (docs/decisions/024-object-stores.md)."""
