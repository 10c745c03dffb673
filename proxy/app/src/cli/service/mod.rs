//! `llama-warden service install|uninstall|show`: the systemd unit of llama-warden. Prints the commands to
//! run next, but does not run them.

mod reach;
mod unit;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use clap::{Args, Subcommand};
use warden_config::machine::HostMachine;
use warden_config::source::layers::{FlagSetting, LoadedConfig};
use warden_config::source::tree::{ConfigNode, ConfigValue};
use warden_config::source::variables::ENV_PREFIX;

use self::reach::{NeededFile, ServiceUser};
use self::unit::{ServiceScope, UNIT_NAME, UnitFileChange, UnitValues};
use crate::cli::shared::ConfigArgs;
use crate::exit::CommandError;
use crate::out;

const PACKAGE_UNIT_DIR: &str = "/usr/lib/systemd/system";

#[derive(Debug, Subcommand)]
pub(crate) enum ServiceCommand {
    /// Writes the unit, with timeouts that match the configuration, and prints the next commands.
    Install(ServiceInstallArgs),
    /// Removes the unit that `install` wrote.
    Uninstall(ServiceUninstallArgs),
    /// Prints the unit that `install` would write.
    Show(UnitArgs),
}

#[derive(Debug, Args)]
pub(crate) struct ScopeArgs {
    /// Service of the calling user, which runs while they are logged in. Default, except for root.
    #[arg(long, conflicts_with = "system")]
    user: bool,
    /// Service of the machine. Default for root.
    #[arg(long)]
    system: bool,
    /// Root directory in place of `/`, as in `systemctl --root`.
    #[arg(long, value_name = "DIR", conflicts_with = "user")]
    root: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct UnitArgs {
    #[command(flatten)]
    scope: ScopeArgs,
    /// Configuration of the service. Default: /etc/llama-warden/warden.toml, for a user
    /// ~/.config/llama-warden/warden.toml.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Program to run. Default: this one.
    #[arg(long, value_name = "PATH")]
    program: Option<PathBuf>,
    /// User of the machine's service.
    #[arg(long, value_name = "NAME", default_value = UNIT_NAME)]
    run_as: String,
    /// Adds a socket unit: systemd listens, and starts llama-warden at the first connection.
    #[arg(long)]
    socket: bool,
    /// Version of systemd. Default: that of this machine.
    #[arg(long, value_name = "NUMBER")]
    systemd: Option<u32>,
}

#[derive(Debug, Args)]
pub(crate) struct ServiceInstallArgs {
    #[command(flatten)]
    unit: UnitArgs,
    /// Replaces a unit that somebody else wrote or changed, and keeps a copy of it.
    #[arg(long)]
    force: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ServiceUninstallArgs {
    #[command(flatten)]
    scope: ScopeArgs,
    /// Removes the unit even if it is changed (keeping a copy) or enabled.
    #[arg(long)]
    force: bool,
}

pub(crate) fn run(command: &ServiceCommand) -> Result<(), CommandError> {
    let machine = HostMachine::read();
    match command {
        ServiceCommand::Show(args) => {
            let units = ServiceUnits::from_args(args, &machine)?;
            let texts: Vec<&str> = units.files.iter().map(|(_, text)| text.as_str()).collect();
            out::print_text(&texts.join("\n"))
        }
        ServiceCommand::Install(args) => install(args, &machine),
        ServiceCommand::Uninstall(args) => uninstall(args, &machine),
    }
}

struct ServiceUnits {
    scope: ServiceScope,
    config: PathBuf,
    folder: PathBuf,
    files: Vec<(String, String)>,
    needed: Vec<NeededFile>,
}

impl ServiceUnits {
    fn from_args(args: &UnitArgs, machine: &HostMachine) -> Result<Self, CommandError> {
        let scope = args.scope.scope(machine);
        let config = match (&args.config, scope) {
            (Some(path), _) => std::path::absolute(path).unwrap_or_else(|_| path.clone()),
            (None, ServiceScope::System) => PathBuf::from("/etc/llama-warden/warden.toml"),
            (None, ServiceScope::User) => machine.config_dir().ok_or_else(no_home)?.join("warden.toml"),
        };
        let program = args.program.clone().or_else(|| machine.exe.clone());
        let program = program.ok_or_else(|| {
            CommandError::hinted(
                "the path of this program is not known",
                "name it: `--program /usr/bin/llama-warden`",
            )
        })?;
        let written = args.scope.path_below_root(&config);
        let loaded = load(&written, machine)?;
        let (drain, grace) = stop_times(&loaded);
        let facts = UnitValues {
            scope,
            program: &program,
            config: &config,
            user: &args.run_as,
            systemd: args.systemd.or_else(systemd_version),
            drain,
            grace,
        };
        let mut files = vec![(format!("{UNIT_NAME}.service"), unit::service_unit(&facts))];
        if args.socket {
            let server = &loaded.settings.server;
            let text = unit::socket_unit(&server.host, server.port).filter(|_| server.port != 0).ok_or_else(
                || {
                    CommandError::hinted(
                        format!("systemd cannot listen on `{}`, port {}", server.host, server.port),
                        "give `server.host` addresses instead of names, and `server.port` a number",
                    )
                },
            )?;
            files.push((format!("{UNIT_NAME}.socket"), text));
        }
        let needed = reach::needed_files(&program, &config, &loaded);
        Ok(Self { scope, folder: args.scope.folder(machine)?, config, files, needed })
    }
}

/// Returns the files that the service's user cannot use, each with the command that fixes the access.
fn obstacles(user: &ServiceUser, scope: &ScopeArgs, needed: &[NeededFile]) -> Vec<(String, String)> {
    let all =
        needed.iter().filter_map(|one| reach::find_obstacle(user, one, |path| scope.path_below_root(path)));
    // A closed folder may hide many files, so list each command once.
    let mut mends = BTreeSet::new();
    all.filter(|(_, command)| mends.insert(command.clone())).collect()
}

impl ScopeArgs {
    fn scope(&self, machine: &HostMachine) -> ServiceScope {
        let is_system = self.system || self.root.is_some() || (machine.uid == 0 && !self.user);
        if is_system { ServiceScope::System } else { ServiceScope::User }
    }

    /// Returns where a path of the service is now, below `--root`.
    fn path_below_root(&self, path: &Path) -> PathBuf {
        match &self.root {
            Some(root) => root.join(path.strip_prefix("/").unwrap_or(path)),
            None => path.to_owned(),
        }
    }

    fn user(&self, name: &str) -> ServiceUser {
        let read =
            |path: &str| std::fs::read_to_string(self.path_below_root(Path::new(path))).unwrap_or_default();
        ServiceUser::read(name, &read("/etc/passwd"), &read("/etc/group"))
    }

    fn folder(&self, machine: &HostMachine) -> Result<PathBuf, CommandError> {
        match self.scope(machine) {
            ServiceScope::System => {
                let root = self.root.as_deref().unwrap_or_else(|| Path::new("/"));
                Ok(root.join("etc/systemd/system"))
            }
            ServiceScope::User => {
                let own = machine.config_dir().ok_or_else(no_home)?;
                Ok(own.with_file_name("systemd").join("user"))
            }
        }
    }
}

fn no_home() -> CommandError {
    CommandError::hinted("it is not known where your home is", "set HOME")
}

/// Loads the configuration as the service will: without the variables of this shell, and with defaults if the
/// file is missing.
fn load(config: &Path, machine: &HostMachine) -> Result<LoadedConfig, CommandError> {
    let is_ours = |name: &std::ffi::OsString| name.to_string_lossy().starts_with(ENV_PREFIX);
    let mut machine = machine.clone();
    machine.env.retain(|(name, _)| !is_ours(name) && name != "CREDENTIALS_DIRECTORY");
    // systemd will set this directory; nothing reads it now.
    machine.env.push(("CREDENTIALS_DIRECTORY".into(), "/run/credentials/llama-warden.service".into()));
    let config = config.exists().then(|| config.to_owned());
    // Do not search folders of models, which may not exist yet.
    let no_folders = FlagSetting {
        flag: "service".to_owned(),
        path: ["paths", "models"].map(str::to_owned).to_vec(),
        value: ConfigNode::new(ConfigValue::List(Vec::new())),
    };
    ConfigArgs { config, set: Vec::new() }.load(&machine, vec![no_folders])
}

fn stop_times(loaded: &LoadedConfig) -> (Duration, Duration) {
    let own = loaded.models.iter().map(|(_, model)| model.lifecycle.stop_grace);
    let grace = own.chain([loaded.defaults.lifecycle.stop_grace]).max().unwrap_or_default();
    (loaded.settings.server.shutdown_deadline, grace)
}

fn systemd_version() -> Option<u32> {
    let told = Command::new("systemctl").arg("--version").output().ok()?;
    String::from_utf8_lossy(&told.stdout).split_whitespace().nth(1)?.parse().ok()
}

fn install(args: &ServiceInstallArgs, machine: &HostMachine) -> Result<(), CommandError> {
    let units = ServiceUnits::from_args(&args.unit, machine)?;
    for (name, text) in &units.files {
        let path = units.folder.join(name);
        let shown = path.display();
        out::print_line(&match unit::write_unit(&path, text, args.force)? {
            UnitFileChange::Written => format!("wrote {shown}"),
            UnitFileChange::Renewed => format!("renewed {shown}"),
            UnitFileChange::Unchanged => format!("{shown} is there already"),
            UnitFileChange::Kept(copy) => format!("wrote {shown}; what was there is now {}", copy.display()),
        })?;
    }
    let packaged =
        args.unit.scope.path_below_root(Path::new(PACKAGE_UNIT_DIR)).join(format!("{UNIT_NAME}.service"));
    if units.scope == ServiceScope::System && packaged.exists() {
        out::print_line(&format!("note: it overrides that of a package, {}", packaged.display()))?;
    }
    let scope = &args.unit.scope;
    let user = (units.scope == ServiceScope::System).then(|| scope.user(&args.unit.run_as));
    let obstacles = user.as_ref().map(|user| obstacles(user, scope, &units.needed)).unwrap_or_default();
    for (why, _) in &obstacles {
        out::print_line(&format!("warning: it could not start: {why}"))?;
    }
    out::print_line("next:")?;
    for line in next_commands(&units, &args.unit, user.as_ref(), &obstacles) {
        out::print_line(&format!("  {line}"))?;
    }
    Ok(())
}

fn next_commands(
    units: &ServiceUnits,
    args: &UnitArgs,
    user: Option<&ServiceUser>,
    obstacles: &[(String, String)],
) -> Vec<String> {
    let mut lines = Vec::new();
    let control = if units.scope == ServiceScope::System { "systemctl" } else { "systemctl --user" };
    let config = args.scope.path_below_root(&units.config);
    if !config.exists() {
        lines
            .push(format!("write {}, for example: paths.models = [\"/FOLDER/OF/MODELS\"]", config.display()));
    }
    lines.push(format!("llama-warden config check {}", units.config.display()));
    if user.is_some_and(|user| !user.is_there) && args.run_as != "root" {
        lines.push(format!(
            "useradd --system --no-create-home --home-dir /var/lib/llama-warden --groups video,render {}",
            args.run_as
        ));
    }
    lines.extend(obstacles.iter().map(|(_, command)| command.clone()));
    lines.push(format!("{control} daemon-reload"));
    let started =
        if args.socket { format!("{UNIT_NAME}.socket {UNIT_NAME}.service") } else { UNIT_NAME.to_owned() };
    lines.push(format!("{control} enable --now {started}"));
    if units.scope == ServiceScope::User {
        lines.push("loginctl enable-linger        # if it is to run while you are not logged in".to_owned());
    }
    lines
}

fn uninstall(args: &ServiceUninstallArgs, machine: &HostMachine) -> Result<(), CommandError> {
    let scope = args.scope.scope(machine);
    let folder = args.scope.folder(machine)?;
    let control = if scope == ServiceScope::System { "systemctl" } else { "systemctl --user" };
    let targets = ["multi-user.target.wants", "default.target.wants", "sockets.target.wants"];
    let names = [format!("{UNIT_NAME}.socket"), format!("{UNIT_NAME}.service")];
    let enabled = targets.iter().flat_map(|target| names.iter().map(move |name| (target, name)));
    let enabled: Vec<PathBuf> = enabled
        .map(|(target, name)| folder.join(target).join(name))
        .filter(|link| std::fs::symlink_metadata(link).is_ok())
        .collect();
    if let (Some(link), false) = (enabled.first(), args.force) {
        return Err(CommandError::hinted(
            format!("it is enabled: {} leads to it", link.display()),
            format!("first `{control} disable --now {}`", names.join(" ")),
        ));
    }
    let mut gone = Vec::new();
    for name in names {
        let path = folder.join(&name);
        match unit::remove_unit(&path, args.force)? {
            None => continue,
            Some(UnitFileChange::Kept(copy)) => {
                out::print_line(&format!("{} is now {}", path.display(), copy.display()))?;
            }
            Some(_) => out::print_line(&format!("removed {}", path.display()))?,
        }
        gone.push(name);
    }
    if gone.is_empty() {
        return out::print_line(&format!("there is no unit of ours in {}", folder.display()));
    }
    // The operator should stop the service first: without its unit, systemd would end a running service by
    // default rules, in the middle of requests.
    out::print_line(&format!("next:\n  {control} stop {}\n  {control} daemon-reload", gone.join(" ")))
}
