//! Finds the end of a JSON object or list whose text comes in pieces.

/// How far a text is inside an object or list. The text of a string may be anything.
#[derive(Debug, Clone, Copy, Default)]
pub struct JsonScan {
    depth: usize,
    in_string: bool,
    escaped: bool,
}

/// What a piece of the text turned out to be; positions are in the piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scanned {
    /// All of it is inside.
    Inside,
    /// The object or list ends before this byte.
    Ended(usize),
    /// This byte, the first of a character, is in no JSON.
    Broken(usize),
}

impl JsonScan {
    /// Takes the next bytes; the first of all opens the object or list.
    pub fn scan(&mut self, bytes: &[u8]) -> Scanned {
        for (at, byte) in bytes.iter().enumerate() {
            #[cfg(test)]
            super::tests::looked_at(1);
            if self.in_string {
                match byte {
                    _ if self.escaped => self.escaped = false,
                    b'\\' => self.escaped = true,
                    b'"' => self.in_string = false,
                    _ => {}
                }
                continue;
            }
            match byte {
                b'"' => self.in_string = true,
                b'{' | b'[' => self.depth += 1,
                b'}' | b']' if self.depth == 1 => return Scanned::Ended(at + 1),
                b'}' | b']' => self.depth -= 1,
                b',' | b':' | b'+' | b'-' | b'.' | b' ' | b'\t' | b'\r' | b'\n' => {}
                byte if byte.is_ascii_alphanumeric() => {}
                _ => return Scanned::Broken(at),
            }
        }
        Scanned::Inside
    }
}
