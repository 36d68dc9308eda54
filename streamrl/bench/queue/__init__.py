"""``streamrl bench queue``: the way from rollouter to trainer, against plain sockets and against other systems."""
