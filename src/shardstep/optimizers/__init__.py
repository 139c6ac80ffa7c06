"""What is known of optimizer classes: found by a trial, read from their options, and used to build them."""
