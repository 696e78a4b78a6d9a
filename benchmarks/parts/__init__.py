"""Single parts of the service: codecs, selection, threads, queues, urgent tensors."""
