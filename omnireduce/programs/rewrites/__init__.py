"""The same program, done another way. Each rewrite checks that it may be done, and otherwise says why not.

split      AllReduce           ->  ReduceScatter, AllGather
reorder    AllGather, compute  ->  compute on the parts, AllGather of what is wanted whole
slices     a Replicated tensor ->  a Sliced one, of which each rank keeps a part
fuse       element-wise stages ->  one pass; ReduceScatter, compute, AllGather -> one AllReduce
overlap    MatMul, reduction   ->  both at the same time, chunk by chunk

Why they are right. A Replicated and a Sliced value are the same tensor: they differ in where its elements lie. An
operation gives the same tensor whichever of the two its operands are, if the layout tables have a result for these at
all. So to replace one by the other changes nothing, wherever the rebuilt expression passes the checker; and `rebuilt`
has it checked. A Local value is another matter: no rewrite replaces one, but an AllReduce by its two halves. The last
two rewrites change no expression at all, only when it is evaluated.
"""
