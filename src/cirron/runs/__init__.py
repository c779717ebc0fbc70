"""Reading runs: from the spool's files to trees. Nothing here records or sends anything."""
