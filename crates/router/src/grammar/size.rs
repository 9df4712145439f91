//! How large a grammar may be, so that compiling it overflows no stack, here or in a worker.
//!
//! The library recurses where a schema is nested or refers to a part of itself, and where a rule
//! names another. The depth of that is bounded by what is counted here, of the text alone.

use std::collections::HashSet;

use serde_json::Value;
use tasuki_flow::Grammar;

/// Of a JSON schema, as of anything that a worker compiles.
pub const MAX_SCHEMA_BYTES: usize = 256 << 10;
/// Objects and lists inside each other in a JSON schema.
pub const MAX_SCHEMA_DEPTH: usize = 64;
/// Different targets of `$ref` times the depth of the schema.
pub const MAX_REFERENCES: usize = 4096;
pub const MAX_REGEX_BYTES: usize = 16 << 10;
/// Of a grammar in Lark, and of what is made of a request's tools.
pub const MAX_LARK_BYTES: usize = 256 << 10;
/// Colons in a grammar in Lark: each rule has one, and each level of a schema in it.
pub const MAX_LARK_RULES: usize = 2048;
/// Braces that open in a grammar in Lark: templates are used inside each other.
pub const MAX_LARK_BRACES: usize = 2048;
/// Alternatives of a choice.
pub const MAX_CHOICES: usize = 1024;

/// A limit, and what is beyond it. The sentence begins with the field's name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    #[error("has {found} bytes; the limit is {limit}")]
    Bytes { found: usize, limit: usize },
    #[error("is nested {found} levels deep; the limit is {limit}")]
    Depth { found: usize, limit: usize },
    #[error(
        "has {references} different $ref and is {depth} levels deep; their product is limited to \
         {limit}"
    )]
    References {
        references: usize,
        depth: usize,
        limit: usize,
    },
    #[error("has {found} rules (colons); the limit is {limit}")]
    Rules { found: usize, limit: usize },
    #[error("has {found} opening braces; the limit is {limit}")]
    Braces { found: usize, limit: usize },
}

/// # Errors
/// The limit that the grammar's text breaks.
pub fn check(grammar: &Grammar) -> Result<(), SizeError> {
    match grammar {
        Grammar::JsonSchema(text) => schema(text),
        Grammar::Regex(pattern) => bytes(pattern, MAX_REGEX_BYTES),
        Grammar::Lark(text) => bytes(text, MAX_LARK_BYTES),
    }
}

/// Of a grammar in Lark that a client wrote.
///
/// # Errors
/// Too long, too many rules, or too many templates in use.
pub fn check_rules(text: &str) -> Result<(), SizeError> {
    let found = text.matches(':').count();
    let limit = MAX_LARK_RULES;
    if found > limit {
        return Err(SizeError::Rules { found, limit });
    }
    let found = text.matches('{').count();
    let limit = MAX_LARK_BRACES;
    if found > limit {
        return Err(SizeError::Braces { found, limit });
    }
    bytes(text, MAX_LARK_BYTES)
}

fn bytes(text: &str, limit: usize) -> Result<(), SizeError> {
    let found = text.len();
    match found > limit {
        true => Err(SizeError::Bytes { found, limit }),
        false => Ok(()),
    }
}

fn schema(text: &str) -> Result<(), SizeError> {
    bytes(text, MAX_SCHEMA_BYTES)?;
    let depth = depth(text);
    if depth > MAX_SCHEMA_DEPTH {
        return Err(SizeError::Depth {
            found: depth,
            limit: MAX_SCHEMA_DEPTH,
        });
    }
    let Ok(schema) = serde_json::from_str(text) else {
        return Ok(());
    };
    let mut targets = HashSet::new();
    find_references(&schema, &mut targets);
    let references = targets.len();
    if references * depth > MAX_REFERENCES {
        return Err(SizeError::References {
            references,
            depth,
            limit: MAX_REFERENCES,
        });
    }
    Ok(())
}

/// How many objects and lists of a JSON text are inside each other.
pub fn depth(json: &str) -> usize {
    let (mut depth, mut deepest) = (0_usize, 0);
    let (mut in_string, mut escaped) = (false, false);
    for byte in json.bytes() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => in_string = !in_string,
            _ if in_string => {}
            b'{' | b'[' => {
                depth += 1;
                deepest = deepest.max(depth);
            }
            b'}' | b']' => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    deepest
}

fn find_references<'a>(schema: &'a Value, targets: &mut HashSet<&'a str>) {
    match schema {
        Value::Object(members) => {
            if let Some(Value::String(target)) = members.get("$ref") {
                targets.insert(target);
            }
            members.values().for_each(|v| find_references(v, targets));
        }
        Value::Array(items) => items.iter().for_each(|v| find_references(v, targets)),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use serde_json::json;

    use super::*;
    use crate::grammar::{compiler, vocabulary};
    use crate::testing::TestModel;

    #[test]
    fn depth_is_that_of_brackets_outside_of_strings() {
        for (json, deep) in [
            ("true", 0),
            (r#"{"a": "[[{\"[[", "b": [1]}"#, 2),
            (r#"["\\", {}]"#, 2),
            ("]]][", 1),
        ] {
            assert_eq!(depth(json), deep, "{json}");
        }
    }

    #[test]
    fn limits_are_named() {
        let nested = |levels: usize| {
            let inner = "{\"items\":".repeat(levels);
            format!("{inner}true{}", "}".repeat(levels))
        };
        let schema = |text: String| check(&Grammar::JsonSchema(text)).map_err(|e| e.to_string());
        assert_eq!(schema(nested(MAX_SCHEMA_DEPTH)), Ok(()));
        let deep = schema(nested(65)).unwrap_err();
        assert_eq!(deep, "is nested 65 levels deep; the limit is 64");
        let long = schema(format!(
            "{{\"title\": \"{}\"}}",
            "x".repeat(MAX_SCHEMA_BYTES)
        ));
        assert!(long.unwrap_err().ends_with("the limit is 262144"));
        let many = schema(chain(2000, 1)).unwrap_err();
        assert!(
            many.starts_with("has 2001 different $ref and is 5 levels"),
            "{many}"
        );
        let regex = check(&Grammar::Regex("a".repeat(20_000))).unwrap_err();
        assert_eq!(regex.to_string(), "has 20000 bytes; the limit is 16384");
        let rules = check_rules(&"a:b\n".repeat(3000)).unwrap_err();
        assert_eq!(
            rules.to_string(),
            "has 3000 rules (colons); the limit is 2048"
        );
    }

    /// Each of so many definitions, itself so deep, refers to the next.
    fn chain(definitions: usize, depth: usize) -> String {
        let reference = |to: usize| json!({"$ref": format!("#/$defs/d{to}")});
        let mut all = serde_json::Map::new();
        for at in 0..definitions {
            let mut schema = reference(at + 1);
            for _ in 0..depth {
                schema = json!({"type": "object", "properties": {"x": schema}, "required": ["x"]});
            }
            all.insert(format!("d{at}"), schema);
        }
        all.insert(format!("d{definitions}"), json!({"type": "null"}));
        json!({"$defs": all, "anyOf": [reference(0), {"type": "null"}]}).to_string()
    }

    #[test]
    fn the_largest_that_is_let_through_overflows_no_stack() {
        let factory = vocabulary::factory(&TestModel::new().text);
        let compiled = |grammar: &Grammar| {
            let compile = || compiler::compile(&factory, grammar);
            thread::scope(|scope| {
                let one = thread::Builder::new().stack_size(compiler::STACK_BYTES);
                let one = one.spawn_scoped(scope, compile).expect("a thread");
                one.join().expect("no panic")
            })
        };
        let rules = (0..MAX_LARK_RULES - 2).map(|at| format!("a{at}: a{}\n", at + 1));
        let rules = format!(
            "start: a0\n{}a{}: \"x\"",
            rules.collect::<String>(),
            MAX_LARK_RULES - 2
        );
        assert_eq!(check_rules(&rules), Ok(()));
        let templates = format!("start: {}", "a{".repeat(MAX_LARK_BRACES));
        assert_eq!(check_rules(&templates), Ok(()));
        let refused = compiled(&Grammar::Lark(templates));
        assert!(refused.is_err(), "no brace is closed");
        for grammar in [
            Grammar::Lark(rules),
            Grammar::JsonSchema(chain(800, 1)),
            Grammar::JsonSchema(chain(63, 29)),
            Grammar::JsonSchema(chain(0, 30)),
            Grammar::Regex("(a".repeat(100) + &")".repeat(100)),
            Grammar::Regex("a?".repeat(MAX_REGEX_BYTES / 8)),
        ] {
            assert_eq!(check(&grammar), Ok(()));
            assert_eq!(compiled(&grammar), Ok(()), "{:.80}", format!("{grammar:?}"));
        }
    }
}
