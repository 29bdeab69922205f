"""What each strategy sends, computes and holds, and which one is the fastest: numbers only, nothing runs."""
