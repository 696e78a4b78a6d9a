"""Frontier merge as pure machines: events in, effects out, time an argument. No I/O, no clock, no threads.

Theory of operation, for one collective on one shard with N ranks:

1. A rank scans the shard's stripes in ascending order and packs its non-zero blocks into slots. A message goes out
   when its slot is full, when `scan_span` blocks were scanned, or at the end. It carries a frontier: all my non-zero
   blocks of this shard below it have been sent. An all-zero tensor is one message without blocks for every
   `scan_span` blocks.
2. The aggregator keeps received slots until their blocks are used. Below the lowest frontier of all ranks nothing can
   be missing, so there it walks the ranks' sorted indices and writes the sum of each block in the union, in rank
   order, into a result slot, which goes to all ranks when it is full, when much has gathered and no input waits, or
   at the end.
3. A rank scatters result blocks into its tensor and returns the slot's credit. The shard is done when the result's
   frontier is the number of blocks.

Bytes: up, the rank's own non-zero blocks; down, the blocks of the union; plus 8 bytes a block and 64 a message. A
block's result can only arrive after the block was packed, so working in place is safe.
"""
