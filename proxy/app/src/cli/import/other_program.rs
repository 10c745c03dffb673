//! Imports a `cmd` of llama-swap that starts another program than llama-server: finds its port in the command,
//! in place of which llama-warden puts a port of its own.

use serde_json::{Map, Value};
use warden_supervisor::spec::PORT_PLACEHOLDER;

use super::imported::ImportedCommand;
use super::llama_swap::text_of;

/// Writes `${PORT}` in place of the port at which llama-swap expects the program. `macro_port`: value of
/// llama-swap's own `${PORT}` for this model. The error says why the model cannot be imported.
pub(super) fn set_port(
    command: &mut ImportedCommand,
    table: &Map<String, Value>,
    macro_port: u64,
) -> Result<(), String> {
    let proxy = text_of(table, "proxy");
    let (named, path) = proxy.as_deref().map_or((None, ""), port_and_path);
    if !path.is_empty() && path != "/" {
        return Err(format!("`proxy` has the path `{path}`, which llama-warden does not put before paths"));
    }
    let port = named.unwrap_or(macro_port).to_string();
    // A number in a command may mean something else, unless the macro put it there.
    let is_certain = named.is_none_or(|named| named == macro_port);
    let mut found = false;
    let mut put = |word: &mut String, names_port: bool| {
        if is_certain || names_port || word.contains([':', '=']) {
            let done = replace_number(word, &port);
            found |= done != *word;
            *word = done;
        }
    };
    let mut names_port = false;
    for word in &mut command.other_program {
        put(word, names_port);
        names_port = word.starts_with('-') && is_port_flag(word);
    }
    for (name, value) in &mut command.env {
        put(value, name.to_ascii_lowercase().contains("port"));
    }
    if found {
        return Ok(());
    }
    Err(format!(
        "its command does not say that it listens on port {port}: write it as `command` of a model, with \
         `${{PORT}}` where it takes its port (docs/models.md#other-programs)"
    ))
}

fn is_port_flag(flag: &str) -> bool {
    flag == "-p" || ["port", "listen", "bind"].iter().any(|name| flag.contains(name))
}

/// Splits `http://host:port/path` into port and path.
fn port_and_path(url: &str) -> (Option<u64>, &str) {
    let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
    let end = rest.find('/').unwrap_or(rest.len());
    let (host, path) = rest.split_at(end);
    (host.rsplit_once(':').and_then(|(_, port)| port.parse().ok()), path)
}

/// Replaces a number where no other digit is next to it.
fn replace_number(word: &str, number: &str) -> String {
    let mut done = String::new();
    let mut rest = word;
    while let Some(at) = rest.find(number) {
        let (before, after) = (&rest[..at], &rest[at + number.len()..]);
        let is_whole = !before.ends_with(|c: char| c.is_ascii_digit())
            && !after.starts_with(|c: char| c.is_ascii_digit());
        done.extend([before, if is_whole { PORT_PLACEHOLDER } else { number }]);
        rest = after;
    }
    done + rest
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn placed(words: &str, env: &[(&str, &str)], proxy: Option<&str>) -> Result<String, String> {
        let mut command = ImportedCommand {
            other_program: words.split(' ').map(str::to_owned).collect(),
            env: env.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect(),
            ..ImportedCommand::default()
        };
        let table = proxy.map(|proxy| ("proxy".to_owned(), json!(proxy))).into_iter().collect();
        set_port(&mut command, &table, 5800)?;
        let env = command.env.into_iter().map(|(name, value)| name + "=" + &value);
        Ok(command.other_program.into_iter().chain(env).collect::<Vec<_>>().join(" "))
    }

    #[test]
    fn the_port_of_a_command_is_found_and_no_other_number() {
        for (words, env, proxy, wanted) in [
            ("a --port 5800 --x 15800", &[][..], None, "a --port ${PORT} --x 15800"),
            ("a -l 5800", &[], Some("http://127.0.0.1:5800"), "a -l ${PORT}"),
            ("a --port 9000 -c 9000", &[], Some("http://localhost:9000/"), "a --port ${PORT} -c 9000"),
            ("a --bind 0.0.0.0:9000", &[], Some("http://127.0.0.1:9000"), "a --bind 0.0.0.0:${PORT}"),
            ("a --http-port=9000", &[], Some("http://127.0.0.1:9000"), "a --http-port=${PORT}"),
            ("a", &[("HTTP_PORT", "9000")], Some("http://127.0.0.1:9000"), "a HTTP_PORT=${PORT}"),
        ] {
            assert_eq!(placed(words, env, proxy).as_deref(), Ok(wanted), "{words}");
        }
        let why = placed("a -c 9000", &[], Some("http://127.0.0.1:9000")).unwrap_err();
        assert!(why.contains("port 9000") && why.contains("${PORT}"), "{why}");
        assert!(
            placed("a --port 9000", &[], Some("http://127.0.0.1:9000/v1")).unwrap_err().contains("`/v1`")
        );
        assert!(placed("a serve", &[], None).unwrap_err().contains("port 5800"));
    }
}
