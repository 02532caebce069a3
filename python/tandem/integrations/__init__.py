"""Tandem inside other libraries, a module each. Importing one changes nothing until its `register` runs."""
