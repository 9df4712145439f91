//! The parts of one answer, whether or not there is something to look for in it.

use super::scanner::{Part, Scanner};

/// Reads one choice's text.
#[derive(Debug, Clone)]
pub struct Reader {
    /// `None`: all is content.
    scanner: Option<Scanner>,
}

impl Reader {
    pub fn new(scanner: Option<Scanner>) -> Self {
        Self { scanner }
    }

    /// Takes the next text; `ended`: it is the last. Returns what is certain by now.
    pub fn read(&mut self, text: String, ended: bool) -> Vec<Part> {
        let Some(scanner) = &mut self.scanner else {
            let content = (!text.is_empty()).then_some(Part::Content(text));
            return Vec::from_iter(content);
        };
        let mut parts = scanner.push(&text);
        if ended {
            parts.extend(scanner.finish());
        }
        parts
    }

    /// Calls so far.
    pub fn calls(&self) -> usize {
        self.scanner.as_ref().map_or(0, Scanner::calls)
    }
}
