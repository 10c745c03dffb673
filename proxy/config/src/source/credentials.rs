//! Resolves `credential:NAME` in keys that take a path: to the file that the service manager provides
//! (`LoadCredential=NAME:…` of a systemd unit). Reads no files.

use std::path::Path;

use serde_json::Value;

use super::tree::{ConfigNode, ConfigValue, TableEntry};
use crate::problem::ConfigProblem;
use crate::schema::format;

const CREDENTIAL_PREFIX: &str = "credential:";
/// Variable that names the directory of credentials; the service manager sets it.
pub(super) const CREDENTIALS_VARIABLE: &str = "CREDENTIALS_DIRECTORY";

/// Replaces `credential:NAME` by a path, in all values that are paths according to the schema.
pub(super) fn resolve_credentials(
    node: &mut ConfigNode,
    schema: &Value,
    directory: Option<&str>,
) -> Vec<ConfigProblem> {
    match &mut node.kind {
        ConfigValue::Table(entries) => {
            let resolve = |entry: &mut TableEntry| {
                let inner = match &schema["properties"][&entry.key] {
                    Value::Null => &schema["additionalProperties"],
                    inner => inner,
                };
                resolve_credentials(&mut entry.value, inner, directory)
            };
            entries.iter_mut().flat_map(resolve).collect()
        }
        ConfigValue::List(items) => {
            let items = items.iter_mut();
            items.flat_map(|item| resolve_credentials(item, &schema["items"], directory)).collect()
        }
        ConfigValue::Text(text) if schema["format"] == format::PATH => {
            let Some(name) = text.strip_prefix(CREDENTIAL_PREFIX) else { return Vec::new() };
            match credential_path(name, directory) {
                Ok(path) => {
                    *text = path;
                    Vec::new()
                }
                Err((message, hint)) => {
                    let problem = ConfigProblem::new(node.place.clone(), format!("`{text}`: {message}"));
                    vec![problem.with_hint(hint)]
                }
            }
        }
        _ => Vec::new(),
    }
}

fn credential_path(name: &str, directory: Option<&str>) -> Result<String, (&'static str, String)> {
    let is_name = |byte: u8| byte.is_ascii_alphanumeric() || b"._-@".contains(&byte);
    if name.is_empty() || name.starts_with('.') || !name.bytes().all(is_name) {
        let hint = format!(
            "write it like `{CREDENTIAL_PREFIX}llama-warden-keys`, as in `LoadCredential=` of the unit"
        );
        return Err(("this is no name of a credential", hint));
    }
    let Some(directory) = directory.filter(|directory| !directory.is_empty()) else {
        let hint = format!(
            "`LoadCredential={name}:/etc/llama-warden/{name}` in the unit hands it over; to check the file \
             by hand, set \
             {CREDENTIALS_VARIABLE} to the folder that it is in"
        );
        return Err(("no credentials were passed to this process", hint));
    };
    Ok(Path::new(directory).join(name).to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::layers::{ConfigSources, load_config};

    fn loaded(key: &str, value: &str, directory: Option<&str>) -> Result<String, String> {
        let (dir, file) = (tempfile::tempdir().unwrap(), "[models.m]\nmodel = \"m.gguf\"\n");
        let path = dir.path().join("w.toml");
        std::fs::write(&path, format!("{key} = {value}\n{file}")).unwrap();
        let env = directory.map(|directory| (CREDENTIALS_VARIABLE.to_owned(), directory.to_owned()));
        let sources =
            ConfigSources { file: Some(path), env: env.into_iter().collect(), ..ConfigSources::default() };
        let loaded =
            load_config(sources).map_err(|problems| problems.0[0].hint.clone().unwrap_or_default())?;
        Ok(loaded.settings.server.keys.clone())
    }

    #[test]
    fn a_credential_is_a_path_where_a_path_is_wanted_and_a_word_elsewhere() {
        let handed = Some("/run/credentials/w.service");
        let keys = |value: &str, directory| loaded("server.keys", value, directory);
        assert_eq!(keys("'credential:keys.toml'", handed).unwrap(), "/run/credentials/w.service/keys.toml");
        assert_eq!(keys("'keys.toml'", handed).unwrap(), "keys.toml");
        assert!(keys("'credential:keys'", None).unwrap_err().contains("LoadCredential=keys:/etc"));
        for bad in ["'credential:'", "'credential:../keys'", "'credential:.'", "'credential:a b'"] {
            assert!(keys(bad, handed).unwrap_err().contains("credential:llama-warden-keys"), "{bad}");
        }
        assert_eq!(
            loaded("server.api_prefix", "'credential:x'", handed).unwrap(),
            "",
            "no path is wanted there"
        );
    }
}
