"""Places with versions of heads, which companions write and engines read: folders and HTTP."""
