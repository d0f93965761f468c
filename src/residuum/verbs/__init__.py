"""What commands do beside words: runs that keep themselves in a folder, one public verb each."""
