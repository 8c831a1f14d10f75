"""Which worker takes the next request. Pure: sees numbers and names, opens nothing, changes nothing, keeps no time.

Each policy is a function (group, key, limit) -> worker or None: the group are the workers of one priority that the
request may go to, key is what it would like to find again (its session, or how its prompt begins; b"": nothing), limit
is how many requests a worker may be answering. None: each of them is at the limit.
"""
