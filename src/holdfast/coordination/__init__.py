"""Agreement between ranks: boards over a Store, rounds, votes, deadlines, failures, the process group.

Torch-free except `group`.
"""
