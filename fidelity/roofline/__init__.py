"""The roofline: what memory's and arithmetic's rates allow each part of a decode at best, and what it reached."""
