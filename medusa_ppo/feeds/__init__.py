"""Stores of head versions, which companions write and engines read: folders and HTTP."""
