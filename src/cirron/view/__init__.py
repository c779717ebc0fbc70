"""What people see: text for terminals and logs, HTML for notebooks. Pure functions of a tree."""
