"""What records a traced job: the spans, and links with a recorder beside them. Each side adds parts of its own."""
