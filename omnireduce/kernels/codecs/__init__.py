"""Codecs: how blocks of float32 travel in fewer bytes.

A rank packs the non-zero blocks of a tensor and encodes each. The aggregator decodes them, adds them in float32 and
encodes the sum once. A block that is zero on a rank does not travel, whatever the codec.

A codec works on many blocks at a time and knows nothing of messages. What it makes of one block depends on this block
alone, and takes the same number of bytes for every block. There is one file for each, and `table` finds them by name.
"""
