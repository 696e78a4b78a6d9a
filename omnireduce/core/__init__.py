"""What all parts speak of: element types, blocks, descriptors, block programs, messages."""
