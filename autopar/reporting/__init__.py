"""What people read of plans: text, a page, figures, a timeline, what differs, progress."""
