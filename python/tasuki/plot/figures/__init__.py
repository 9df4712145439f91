"""What a picture says: `Results` in, `marks.Figure` out. Nobody draws here."""
