"""What runs on the user's thread.

`hot.py` records, `clock.py` reads clocks and creates ids, `value.py` reads the value of a mark.
"""
