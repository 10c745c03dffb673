//! Models that another program than llama-server serves (`command`): the keys that only llama-server
//! understands. Their functions are off for such a model, even if `[defaults]` turns them on, and its own table
//! may not set them.

use warden_supervisor::spec::SOCKET_PLACEHOLDER;

use self::ServerKeyValue::{Missing, Mode, Off, Socket, Unused};
use super::tree::{ConfigNode, ConfigValue};
use crate::problem::owned_path;

/// Key of a model whose value names the program.
const COMMAND_KEY: &str = "command";

const LIMIT_KEY: &str = "max_in_flight";
/// Default number of concurrent requests of such a program, as in llama-swap: most programs have a queue of
/// their own, and how many requests they compute at the same time is not known.
const MAX_IN_FLIGHT: i64 = 10;

/// Value of a llama-server's key for another program.
#[derive(Clone, Copy)]
enum ServerKeyValue {
    /// The key is left out.
    Missing,
    /// The default stays, but has no effect.
    Unused,
    /// The value that turns the function off.
    Mode(&'static str),
    /// The switch is off.
    Off,
    /// `unix` or `tcp`, by the placeholder in the command.
    Socket,
}

/// Keys that only llama-server understands.
const SERVER_KEYS: [(&[&str], ServerKeyValue); 18] = [
    (&["model"], Missing),
    (&["binary"], Missing),
    (&["build"], Missing),
    (&["args"], Missing),
    (&["fallback"], Missing),
    (&["mitigations"], Missing),
    (&["socket"], Socket),
    (&["memory_report"], Off),
    (&["cancel"], Mode("off")),
    (&["on_death"], Mode("error")),
    (&["warm"], Mode("off")),
    (&["warm_bytes"], Unused),
    (&["warm_away"], Unused),
    (&["warm_disk_bytes"], Unused),
    (&["warm_disk_age"], Unused),
    (&["policy", "reclaim"], Off),
    (&["policy", "admission"], Mode("off")),
    (&["policy", "answers"], Mode("off")),
];

/// Returns what `[defaults]` is for a model with this table: for one with `command`, without the functions
/// of llama-server.
pub(super) fn defaults_for(defaults: Option<&ConfigNode>, own: Option<&ConfigNode>) -> ConfigNode {
    let mut base = defaults.cloned().unwrap_or_else(ConfigNode::table);
    let Some((own, command)) = own.and_then(|own| Some((own, own.entry(COMMAND_KEY)?))) else { return base };
    let mode = if uses_socket(own) || uses_socket(&base) { "unix" } else { "tcp" };
    let mut set = |path: &[&str], kind: ConfigValue| {
        base.merge(ConfigNode::with_value(&command.key_place, &owned_path(path), ConfigNode::new(kind)));
    };
    for (path, value) in SERVER_KEYS {
        match value {
            Missing | Unused => {}
            Mode(word) => set(path, ConfigValue::Text(word.to_owned())),
            Off => set(path, ConfigValue::Bool(false)),
            Socket => set(path, ConfigValue::Text(mode.to_owned())),
        }
    }
    if defaults.is_none_or(|defaults| defaults.entry(LIMIT_KEY).is_none()) {
        set(&[LIMIT_KEY], ConfigValue::Int(MAX_IN_FLIGHT));
    }
    for (path, value) in SERVER_KEYS {
        if let ([key], Missing) = (path, value) {
            base.take(key);
        }
    }
    base
}

fn uses_socket(table: &ConfigNode) -> bool {
    let words = table.entry(COMMAND_KEY).into_iter().flat_map(|command| command.value.items());
    let variables = table.entry("env").into_iter().flat_map(|env| env.value.entries());
    let mut texts = words.chain(variables.map(|entry| &entry.value)).filter_map(ConfigNode::text);
    texts.any(|text| text.contains(SOCKET_PLACEHOLDER))
}

/// Returns the paths of the keys in a model's own table that only llama-server understands. A key with the
/// value that it has anyway is accepted, because `config show` prints all values.
pub(crate) fn refused_keys(defaults: Option<&ConfigNode>, own: &ConfigNode) -> Vec<Vec<String>> {
    if own.entry(COMMAND_KEY).is_none() {
        return Vec::new();
    }
    let base = defaults_for(defaults, Some(own));
    let is_refused = |path: &&[&str]| {
        let given = own.find(path);
        given.is_some() && given.map(|node| &node.kind) != base.find(path).map(|node| &node.kind)
    };
    SERVER_KEYS.iter().map(|(path, _)| *path).filter(is_refused).map(owned_path).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::layers::loaded;
    use warden_policies::modes::{OnDeath, SocketMode, WarmMode};

    #[test]
    fn what_all_models_have_of_llama_server_is_off_for_another_program() {
        let loaded = loaded(
            "[defaults]\nargs = [\"-c\", \"1\"]\nbinary = \"b\"\nmitigations = [\"no-mmap\"]\nwarm = \"disk\"\n\
             policy.admission = \"enforce\"\nttl = \"1h\"\n\
             [models.a]\ncommand = [\"a\", \"${PORT}\"]\n\
             [models.b]\ncommand = [\"b\"]\nenv = { UDS = \"${SOCKET}\" }\nmax_in_flight = 2\n\
             [models.llama]\nmodel = \"m\"\n",
        );
        let [(_, a), (_, b), (_, llama)] = loaded.models.as_slice() else { panic!("{:?}", loaded.models) };
        assert!(a.args.is_empty() && a.binary.is_none() && a.mitigations.is_empty());
        assert_eq!((a.run.warm, a.run.on_death, a.run.memory_report), (WarmMode::Off, OnDeath::Error, false));
        assert!(!a.policy.common.reclaim && a.policy.common.admission.as_str() == "off");
        assert_eq!((a.run.socket, b.run.socket), (SocketMode::Tcp, SocketMode::Unix));
        assert_eq!((a.max_in_flight, b.max_in_flight, a.ttl), (Some(10), Some(2), llama.ttl));
        assert_eq!((llama.run.warm, llama.max_in_flight), (WarmMode::Disk, None));
        assert_eq!(llama.args, ["-c", "1"]);
    }

    #[test]
    fn the_own_table_of_such_a_model_may_not_have_them() {
        let text = "[models.a]\ncommand = [\"a\", \"${PORT}\"]\nmodel = \"m\"\nargs = []\nwarm = \"auto\"\n\
                    on_death = \"error\"\npolicy.reclaim = true\nwarm_bytes = \"1GiB\"\nttl = \"1h\"\n";
        let loaded = loaded(text);
        let own = loaded.own_table("a").unwrap();
        let refused = refused_keys(loaded.tree.find(&["defaults"]), own);
        let refused: Vec<String> = refused.iter().map(|path| path.join(".")).collect();
        assert_eq!(refused, ["model", "args", "warm", "warm_bytes", "policy.reclaim"]);
    }
}
