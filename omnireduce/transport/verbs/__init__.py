"""RDMA links on pyverbs: `devices` finds where to send from, `queue` owns the verbs objects, `link` is the transport.

Nothing here is imported unless a verbs link is wanted; pyverbs itself only by `devices` and `queue`.
"""
