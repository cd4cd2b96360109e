"""How the results of each question become a table: one file for each part of the project."""
