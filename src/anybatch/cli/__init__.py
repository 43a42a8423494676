"""The command line: one file per command. Makes no decision that Python code cannot make too."""
