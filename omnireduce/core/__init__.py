"""Basic terms that all parts use: element types, blocks, descriptors, block programs, messages."""
