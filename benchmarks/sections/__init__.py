"""What is measured, one module for each part of the report."""
