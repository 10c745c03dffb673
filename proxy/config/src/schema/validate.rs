//! Validates a tree of values against the JSON Schema, and reports all problems together.
//!
//! Supports only the part of JSON Schema that [`crate::schema`] produces: objects with known keys or with
//! one schema for all keys, lists, enums, ranges, and formats of this crate. Text from variables and flags
//! gets its type here, because only the schema shows if `1` is a number or a word.

use serde_json::Value;

use super::compiled_in;
use super::values::{accepts_type, check_value, convert_raw};
use crate::problem::{ConfigProblem, dotted_key, similarity};
use crate::schema::root::root_schema;
use crate::source::tree::{ConfigNode, ConfigValue, TableEntry};

/// Validates a whole tree, and converts raw text to the types of the schema.
pub(crate) fn validate(tree: &mut ConfigNode) -> Vec<ConfigProblem> {
    validate_as(tree, root_schema())
}

pub(crate) fn validate_as(tree: &mut ConfigNode, schema: &Value) -> Vec<ConfigProblem> {
    let mut walk = TreeValidator::default();
    walk.check(tree, schema, &mut Vec::new());
    walk.problems
}

#[derive(Default)]
struct TreeValidator {
    problems: Vec<ConfigProblem>,
}

impl TreeValidator {
    fn check(&mut self, node: &mut ConfigNode, schema: &Value, path: &mut Vec<String>) {
        if let ConfigValue::Raw(text) = &node.kind {
            node.kind = convert_raw(text, &node.place, schema);
        }
        if schema["format"].is_null() && !schema["enum"].is_array() {
            if accepts_type(schema, "object") {
                return self.check_table(node, schema, path);
            }
            if accepts_type(schema, "array") {
                return self.check_list(node, schema, path);
            }
        }
        if let Some(message) = check_value(node, schema) {
            self.report(node, path, &message);
        }
    }

    fn report(&mut self, node: &ConfigNode, path: &[String], message: &str) {
        let message = format!("`{}`: {message}", dotted_key(path));
        self.problems.push(ConfigProblem::new(node.place.clone(), message));
    }

    fn check_list(&mut self, node: &mut ConfigNode, schema: &Value, path: &mut Vec<String>) {
        let noun = node.noun();
        let ConfigValue::List(items) = &mut node.kind else {
            let message = format!("this is {noun}; a list is needed, like `[\"a\", \"b\"]`");
            return self.report(node, path, &message);
        };
        for item in items {
            self.check(item, &schema["items"], path);
        }
    }

    fn check_table(&mut self, node: &mut ConfigNode, schema: &Value, path: &mut Vec<String>) {
        let noun = node.noun();
        let ConfigValue::Table(entries) = &mut node.kind else {
            let message = format!("this is {noun}; a table is needed, like `[{}]`", dotted_key(path));
            return self.report(node, path, &message);
        };
        for entry in entries {
            let inner = match &schema["properties"][&entry.key] {
                Value::Null if schema["additionalProperties"].is_object() => &schema["additionalProperties"],
                Value::Null
                    if path.is_empty()
                        && entry.key == compiled_in::INTERNAL
                        && std::ptr::eq(schema, root_schema()) =>
                {
                    compiled_in::internal()
                }
                Value::Null => {
                    self.report_unknown(entry, path, schema);
                    continue;
                }
                inner => inner,
            };
            path.push(entry.key.clone());
            self.check(&mut entry.value, inner, path);
            path.pop();
        }
    }

    /// Reports an unknown entry. For a section without public keys, each of its keys is reported instead.
    fn report_unknown(&mut self, entry: &TableEntry, path: &[String], schema: &Value) {
        if !matches!(entry.value.kind, ConfigValue::Table(_)) || !compiled_in::is_section(path, &entry.key) {
            self.problems.push(unknown(entry, path, schema));
            return;
        }
        let path = [entry.key.clone()];
        let inner = entry.value.entries();
        self.problems.extend(inner.iter().map(|entry| unknown(entry, &path, &Value::Null)));
        if inner.is_empty() {
            let message = format!("nothing in `[{}]` is a key: its numbers are compiled in", entry.key);
            let problem = ConfigProblem::new(entry.key_place.clone(), message);
            self.problems.push(problem.with_hint("leave the section out"));
        }
    }
}

fn unknown(entry: &TableEntry, path: &[String], schema: &Value) -> ConfigProblem {
    let key = entry.key.as_str();
    let place = entry.key_place.clone();
    let is_bare = !std::ptr::eq(schema, root_schema());
    if let Some(problem) = compiled_in::compiled_in_problem(place.clone(), path, key, is_bare) {
        return problem;
    }
    let section =
        if path.is_empty() { "at the top level".to_owned() } else { format!("in [{}]", dotted_key(path)) };
    let problem = ConfigProblem::new(place, format!("unknown key `{key}` {section}"));
    let known = schema["properties"].as_object().into_iter().flatten();
    let scored = known.map(|(known, _)| (similarity(key, known), known));
    let near = scored.max_by(|a, b| a.0.total_cmp(&b.0));
    match (near, section_of_key(key, root_schema(), &mut Vec::new())) {
        (near, Some(home)) if near.is_none_or(|(score, _)| score < 0.8) => {
            problem.with_hint(format!("`{key}` belongs in [{home}]"))
        }
        (Some((_, known)), _) => problem.with_hint(format!("the nearest valid key is `{known}`")),
        (None, _) => problem,
    }
}

/// Returns the section in which a key of this name exists, for a hint.
fn section_of_key(key: &str, schema: &Value, path: &mut Vec<String>) -> Option<String> {
    let known = schema["properties"].as_object();
    if !path.is_empty() && known.is_some_and(|known| known.contains_key(key)) {
        return Some(path.join("."));
    }
    let any_name =
        schema["additionalProperties"].as_object().map(|_| ("\"name\"", &schema["additionalProperties"]));
    let inner = known.into_iter().flatten().map(|(name, inner)| (name.as_str(), inner));
    for (name, inner) in inner.chain(any_name) {
        path.push(name.to_owned());
        let found = section_of_key(key, inner, path);
        path.pop();
        if found.is_some() {
            return found;
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::SourceLines;

    fn problems(text: &str) -> Vec<ConfigProblem> {
        let document = toml_edit::Document::parse(text).unwrap();
        let lines = SourceLines::new("w.toml".as_ref(), text);
        let mut tree = ConfigNode::from_item(document.as_item(), &|span| lines.place(span));
        validate(&mut tree)
    }

    /// Reports on texts with one problem each.
    fn told(texts: &[&str]) -> String {
        let of = |text: &&str| {
            let all = problems(text);
            assert_eq!(all.len(), 1, "{all:?}");
            let hint = all[0].hint.as_ref().map(|hint| format!("    hint: {hint}\n"));
            format!("{}\n{}", all[0], hint.unwrap_or_default())
        };
        texts.iter().map(of).collect()
    }

    #[test]
    fn an_unknown_key_is_named_with_its_line_and_the_nearest_valid_key_or_the_right_section() {
        insta::assert_snapshot!(told(&[
            "[server]\nhots = \"x\"\n",
            "[models.\"a/b\"]\nmodel = \"x\"\npolcy.x = 1\n",
            "sever = 1",
            "port = 1",
            "models.internal.growth = 1",
        ]));
    }

    #[test]
    fn a_number_that_is_compiled_in_is_refused_wherever_it_stood() {
        insta::assert_snapshot!(told(&[
            "[models.m.lifecycle]\nunknown_slots = 1",
            "[server]\ntls_handshake_timeout = \"9s\"",
            "growth.host_effect = \"1MiB\"",
            "[defaults.policy]\nload_factor = 1.0",
            "[models.\"a.b\".quarantine]\nknown = 1",
            "[diagnose]\nsettle = \"1s\"",
            "[levels]\nkill_vram = \"1GiB\"",
            "[growth]\nhots_effect = 1\n",
        ]));
        assert_eq!(problems("[growth]\nhost_effect = 1\nwindow = 9\n").len(), 2);
    }

    #[test]
    fn internal_numbers_are_checked_as_keys_are() {
        assert_eq!(
            problems("[internal.growth]\nhost_effect = \"1MiB\"\n[internal.recycle]\nload_factor = 1\n"),
            []
        );
        insta::assert_snapshot!(told(&[
            "internal.server.tls_handshake_timeout = \"0s\"",
            "internal.server.port = 1",
            "internal.levels.kill_vram = 1",
        ]));
    }

    #[test]
    fn a_bad_value_is_named_with_its_line_and_the_right_form() {
        insta::assert_snapshot!(told(&[
            "[models.m.policy]\nhost.soft = \"12 GB of ram\"",
            "[server]\nkeep_alive = 30",
            "[diagnose]\nleg_limit = \"200000000000000d\"",
            "[diagnose]\nleg_limit = \"0s\"",
            "[diagnose]\nrequest_limit = \"10ms\"",
            "[server]\n\nport = 70000",
            "[server]\nport = \"x\"",
            "[models.m]\nreplace = \"both\"",
            "[models.m]\nargs = \"-c 1\"",
            "models = 3",
            "server.cors = \"*\"",
            "server.cors = true",
            "server.cors = [1]",
            "server.names = \"*\"",
            "server.names = [\"https://a\"]",
            "build.sources.mine = \"../a\"",
            "build.sources.mine = \"ssh://a/b\"",
            "build.sources.mine = \"https://a/b#\"",
            "build.sources.mine = 1",
        ]));
    }

    #[test]
    fn all_problems_are_told_at_once() {
        assert_eq!(problems("[server]\nprot = 1\nport = true\n[queue]\n[models.m]\nreplicas = 0\n").len(), 4);
    }

    #[test]
    fn what_is_right_has_no_problem() {
        let text = "[server]\nport = 0\nbody_bytes = \"1GiB\"\nkeep_alive = \"1h30m\"\n[defaults.policy]\njitter = 0\n\
                    [models.m]\nargs = [\"-c\", \"1\"]\nenv = { A = \"b\" }\npolicy.host = { soft = \"80%\", hard = 1 }\n";
        assert_eq!(problems(text), []);
    }

    #[test]
    fn origins_are_words_or_a_list() {
        for text in ["\"mirror\"", "\"off\"", "\"https://a\"", "[\"https://a\", \"http://b:1\"]", "[]"] {
            assert_eq!(problems(&format!("server.cors = {text}")).len(), 0, "{text}");
        }
        for text in ["\"*\"", "true", "[\"https://a/x\"]", "[1]", "[\"off\", \"https://a\"]"] {
            assert_eq!(problems(&format!("server.cors = {text}")).len(), 1, "{text}");
        }
    }

    #[test]
    fn host_names_are_words_or_a_list() {
        for text in ["\"auto\"", "\"any\"", "\"llm.example\"", "[\"llm.example\", \"*.home.arpa\"]", "[]"] {
            assert_eq!(problems(&format!("server.names = {text}")).len(), 0, "{text}");
        }
        for text in ["\"*\"", "1", "[\"https://a\"]", "[\"a.example:80\"]", "[1]", "[\"any\", \"a\"]"] {
            assert_eq!(problems(&format!("server.names = {text}")).len(), 1, "{text}");
        }
    }

    #[test]
    fn a_git_source_is_a_url_or_an_absolute_path() {
        for text in ["https://example.org/a#v1", "/srv/llama.cpp", "file:///srv/a"] {
            assert_eq!(problems(&format!("build.sources.mine = \"{text}\"")).len(), 0, "{text}");
        }
    }
}
