"""How a state is put on disk and comes back: a tree without its types, and a format for each kind
of array in it. One file a kind; none of them imports a framework before a state needs it.
"""
