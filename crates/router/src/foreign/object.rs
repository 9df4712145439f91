//! A JSON object whose fields stay as the client wrote them.

use std::fmt;
use std::sync::Arc;

use serde::de::{MapAccess, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::value::{RawValue, to_raw_value};

/// Fields in their order, each value with the very bytes that were received: numbers keep
/// their digits, and objects the order of their fields. A clone shares the values.
#[derive(Debug, Clone, Default)]
pub struct Object(Vec<(String, Arc<RawValue>)>);

impl Object {
    /// A field's value; of several of one name the last one, as in Python.
    pub fn get(&self, name: &str) -> Option<&RawValue> {
        let mut fields = self.0.iter().rev();
        fields.find_map(|(known, value)| (known == name).then_some(&**value))
    }

    /// A field's value, if it is a `T`.
    pub fn read<'a, T: Deserialize<'a>>(&'a self, name: &str) -> Option<T> {
        serde_json::from_str(self.get(name)?.get()).ok()
    }

    /// The fields that are there and not null.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        let given = self.0.iter().filter(|(_, value)| value.get() != "null");
        given.map(|(name, _)| name.as_str())
    }

    /// Whether a field is there and not null.
    pub fn has(&self, name: &str) -> bool {
        self.get(name).is_some_and(|value| value.get() != "null")
    }

    /// Gives a field a value, at its place or at the end.
    pub fn set(&mut self, name: &str, value: &impl Serialize) {
        let value = to_raw_value(value).expect("a value without maps of odd keys is JSON");
        self.set_raw(name, value);
    }

    /// The same, of a value that is JSON already.
    pub fn set_raw(&mut self, name: &str, value: impl Into<Arc<RawValue>>) {
        let value = value.into();
        let at = self.0.iter().position(|(known, _)| known == name);
        match at {
            Some(at) => {
                self.0[at].1 = value;
                let mut index = 0;
                self.0.retain(|(known, _)| {
                    index += 1;
                    known != name || index == at + 1
                });
            }
            None => self.0.push((name.to_owned(), value)),
        }
    }

    pub fn remove(&mut self, name: &str) {
        self.0.retain(|(known, _)| known != name);
    }

    pub fn to_json(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("raw values are JSON")
    }
}

impl<'de> Deserialize<'de> for Object {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Fields;
        impl<'de> Visitor<'de> for Fields {
            type Value = Object;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Object, A::Error> {
                let mut fields = Vec::new();
                while let Some((name, value)) = map.next_entry::<_, Box<RawValue>>()? {
                    fields.push((name, value.into()));
                }
                Ok(Object(fields))
            }
        }
        deserializer.deserialize_map(Fields)
    }
}

impl Serialize for Object {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (name, value) in &self.0 {
            map.serialize_entry(name, &**value)?;
        }
        map.end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Object {
        serde_json::from_str(text).expect("an object")
    }

    #[test]
    fn what_is_not_touched_keeps_its_bytes() {
        let text = r#"{"z":1.50,"a":{"y":1,"b":[ 1e400 ]},"n":12345678901234567890123,"é":null}"#;
        assert_eq!(String::from_utf8(parse(text).to_json()).unwrap(), text);
        let mut object = parse(text);
        object.set("z", &2);
        object.remove("a");
        object.set("new", &"x\n");
        let expected = r#"{"z":2,"n":12345678901234567890123,"é":null,"new":"x\n"}"#;
        assert_eq!(String::from_utf8(object.to_json()).unwrap(), expected);
    }

    #[test]
    fn the_last_of_equal_names_counts() {
        let mut object = parse(r#"{"a":1,"b":2,"a":3}"#);
        assert_eq!(object.read::<u32>("a"), Some(3));
        assert_eq!(object.read::<String>("a"), None);
        object.set("a", &4);
        assert_eq!(object.to_json(), br#"{"a":4,"b":2}"#);
        assert!(object.has("b") && !parse(r#"{"b":null}"#).has("b"));
        assert!(serde_json::from_str::<Object>("[1]").is_err());
    }
}
