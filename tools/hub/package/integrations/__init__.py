"Losses in the places of frameworks."
