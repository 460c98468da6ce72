"""A store in a bucket of S3, Google Cloud Storage or Azure, which is accessed with obstore
(docs/decisions/024-object-stores.md).
"""
