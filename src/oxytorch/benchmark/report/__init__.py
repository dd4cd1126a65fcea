"""Results as tables, pages and plots."""
