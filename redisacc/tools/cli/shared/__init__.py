"""What several commands use: options, output, failures, files of arrays, a server of their own."""
