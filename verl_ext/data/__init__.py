"""How data sets are read, cleaned and written; the scripts are in data/."""
