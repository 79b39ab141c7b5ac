"""The rule table: factors of each primitive, and how an equation is computed on local pieces."""
