"""Process groups, collectives and the count of what they move."""
