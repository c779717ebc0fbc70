"""What runs on the user's thread, and the step that takes it off that thread.

`hot.py` records, `clock.py` tells time and names things, `value.py` takes a mark's value,
`collect.py` is where the background thread picks the records up.
"""
