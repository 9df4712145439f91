//! How models write whole answers of calls, as data: what a grammar makes them write.

/// A part of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fragment {
    /// A mark, which may be a token of its own.
    Mark(&'static str),
    Text(&'static str),
    /// The function's name.
    Name,
    /// JSON of the function's arguments.
    Arguments,
    /// An id of nine letters and digits.
    Id,
    /// White space, or none.
    Gap,
}

/// One way to write calls. The first piece of all is a mark, but where a call is JSON alone.
#[derive(Debug)]
pub struct Written {
    /// A chat template with this text writes so.
    pub shown_by: &'static str,
    pub begin: &'static [Fragment],
    pub call: &'static [Fragment],
    pub between: &'static [Fragment],
    pub end: &'static [Fragment],
}

use Fragment::{Arguments, Gap, Id, Mark, Name, Text};

pub static HERMES: [Written; 1] = [Written {
    shown_by: "",
    begin: &[],
    call: &[
        Mark("<tool_call>"),
        Gap,
        Text("{\"name\": \""),
        Name,
        Text("\", \"arguments\": "),
        Arguments,
        Text("}"),
        Gap,
        Mark("</tool_call>"),
    ],
    between: &[Gap],
    end: &[],
}];

/// Newer models first.
pub static MISTRAL: [Written; 3] = [
    Written {
        shown_by: "[CALL_ID]",
        begin: &[],
        call: &[
            Mark("[TOOL_CALLS]"),
            Name,
            Mark("[CALL_ID]"),
            Id,
            Mark("[ARGS]"),
            Arguments,
        ],
        between: &[],
        end: &[],
    },
    Written {
        shown_by: "[ARGS]",
        begin: &[],
        call: &[Mark("[TOOL_CALLS]"), Name, Mark("[ARGS]"), Arguments],
        between: &[],
        end: &[],
    },
    Written {
        shown_by: "",
        begin: &[Mark("[TOOL_CALLS]"), Gap, Text("[")],
        call: &[
            Text("{\"name\": \""),
            Name,
            Text("\", \"arguments\": "),
            Arguments,
            Text("}"),
        ],
        between: &[Text(", ")],
        end: &[Text("]")],
    },
];

pub static LLAMA: [Written; 1] = [Written {
    shown_by: "",
    begin: &[],
    call: &[
        Text("{\"name\": \""),
        Name,
        Text("\", \"parameters\": "),
        Arguments,
        Text("}"),
    ],
    between: &[Text("; ")],
    end: &[],
}];

/// V3 and R1, then V3.1.
pub static DEEPSEEK: [Written; 2] = [
    Written {
        shown_by: "```json",
        begin: &[Mark("<｜tool▁calls▁begin｜>")],
        call: &[
            Mark("<｜tool▁call▁begin｜>"),
            Text("function"),
            Mark("<｜tool▁sep｜>"),
            Name,
            Text("\n```json\n"),
            Arguments,
            Text("\n```"),
            Mark("<｜tool▁call▁end｜>"),
        ],
        between: &[Gap],
        end: &[Mark("<｜tool▁calls▁end｜>")],
    },
    Written {
        shown_by: "",
        begin: &[Mark("<｜tool▁calls▁begin｜>")],
        call: &[
            Mark("<｜tool▁call▁begin｜>"),
            Name,
            Mark("<｜tool▁sep｜>"),
            Arguments,
            Mark("<｜tool▁call▁end｜>"),
        ],
        between: &[],
        end: &[Mark("<｜tool▁calls▁end｜>")],
    },
];
