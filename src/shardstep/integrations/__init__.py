"""Training frameworks, one file each. Each file imports its framework, and nothing else imports these files."""
