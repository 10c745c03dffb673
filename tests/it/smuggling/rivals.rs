//! Compares the corpus with nginx and haproxy: llama-warden refuses what they refuse, or the corpus gives a
//! reason. Without these programs the test is skipped, except in CI.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use warden_rig::process::Kid;
use warden_rig::raw::{Log, talk};
use warden_rig::{Context as _, Home, Http, Outcome, Trouble, binaries, wait_until};

use super::corpus::{self, Case, Verdict};

/// The rivals close a stalled connection after a second.
const PATIENCE: Duration = Duration::from_secs(10);
/// Set by `.ci/run`, which installs both.
const REQUIRED: &str = "WARDEN_TEST_RIVALS";
/// File with the table.
const DOCUMENT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/testing.md");
const BEGIN: &str = "<!-- differential: begin -->\n";
const END: &str = "<!-- differential: end -->\n";

struct Rival {
    name: &'static str,
    _upstream: Kid,
    _proxy: Kid,
    _home: Home,
    http: Http,
    log: Log,
}

fn program(name: &str) -> Option<PathBuf> {
    ["/usr/sbin", "/usr/bin", "/usr/local/sbin", "/usr/local/bin"]
        .into_iter()
        .map(|folder| Path::new(folder).join(name))
        .find(|path| path.exists())
}

async fn start(name: &'static str, program: &Path) -> Result<Rival, Trouble> {
    let home = Home::new()?;
    let root = home.path().to_owned();
    let (socket, log, port) = (root.join("up.sock"), root.join("raw.jsonl"), warden_rig::ports::free()?);
    let mut env = home.env.clone();
    env.insert("RAW_LLAMA_LOG".into(), log.clone().into());
    let args: [OsString; 2] = ["--host".into(), socket.clone().into()];
    let upstream = Kid::start(&binaries::raw_llama()?, &args, &env, &root, root.join("upstream.log"))?;
    let (root, socket) = (root.display(), socket.display());
    let (config, args) = if name == "nginx" {
        let mut temporary = String::new();
        for kind in ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"] {
            let _infallible = write!(temporary, "{kind}_temp_path {root}/{kind};");
        }
        let text = format!(
            "daemon off; master_process off; pid {root}/pid; error_log {root}/error.log;\n\
             events {{ worker_connections 256; }}\n\
             http {{ access_log off; {temporary} client_header_timeout 1s; client_body_timeout 1s; lingering_time 1s;\n\
             lingering_timeout 1s; client_max_body_size 64m;\n\
             server {{ listen 127.0.0.1:{port}; location / {{ proxy_http_version 1.1; proxy_pass http://unix:{socket}:; }} }} }}\n"
        );
        let file = home.file("nginx.conf", text)?;
        (file.clone(), vec![OsString::from("-p"), home.path().into(), "-c".into(), file.into()])
    } else {
        let text = format!(
            "global\n  maxconn 256\n\
             defaults\n  mode http\n  timeout connect 1s\n  timeout client 1s\n  timeout server 5s\n  timeout http-request 1s\n\
             frontend f\n  bind 127.0.0.1:{port}\n  default_backend b\n\
             backend b\n  server s unix@{socket}\n"
        );
        let file = home.file("haproxy.cfg", text)?;
        (file.clone(), vec![OsString::from("-db"), "-f".into(), file.into()])
    };
    let proxy = Kid::start(program, &args, &home.env, home.path(), home.path().join("proxy.log"))?;
    let http = Http::Tcp(([127, 0, 0, 1], port).into());
    wait_until(&format!("{name} with {} serves", config.display()), Duration::from_secs(10), async || {
        http.get("/health").await.is_ok_and(|answer| answer.status == 200)
    })
    .await?;
    Ok(Rival { name, _upstream: upstream, _proxy: proxy, _home: home, http, log: Log::at(&log) })
}

/// Result of a case with a rival: its status, `passed`, or another end.
async fn verdict(rival: &Rival, case: &Case) -> Result<String, Trouble> {
    let before = rival.log.requests()?.len();
    let went = talk(&rival.http, &case.bytes, PATIENCE).await?;
    let after = rival.http.get("/health").await?;
    assert_eq!(after.status, 200, "{} after {}", rival.name, case.name);
    let got = rival.log.requests()?.split_off(before);
    if !got.is_empty() {
        return Ok("passed".to_owned());
    }
    Ok(match went.status() {
        0 => "closed".to_owned(),
        status => status.to_string(),
    })
}

fn ours(verdict: &Verdict) -> String {
    match verdict {
        Verdict::Refused(0) => "refused".to_owned(),
        Verdict::Refused(status) | Verdict::Ours(status) => status.to_string(),
        Verdict::Passed(_) => "passed".to_owned(),
        Verdict::Closed => "closed".to_owned(),
        Verdict::Never => "never complete".to_owned(),
    }
}

fn version(program: &Path) -> String {
    let output = std::process::Command::new(program).arg("-v").output();
    let text = output.map(|output| [output.stdout, output.stderr].concat()).unwrap_or_default();
    let text = String::from_utf8_lossy(&text).into_owned();
    let number = |word: &&str| word.trim_start_matches("nginx/").starts_with(|c: char| c.is_ascii_digit());
    let word = text.split_whitespace().find(number).unwrap_or_default();
    word.trim_start_matches("nginx/").split('-').next().unwrap_or_default().to_owned()
}

#[tokio::test]
async fn what_nginx_and_haproxy_refuse_we_refuse_or_say_why_not() -> Outcome {
    let found: Vec<(&'static str, PathBuf)> =
        ["nginx", "haproxy"].into_iter().filter_map(|name| Some((name, program(name)?))).collect();
    if found.len() < 2 {
        assert!(std::env::var_os(REQUIRED).is_none(), "nginx and haproxy must be installed here");
        eprintln!("skipped: nginx and haproxy are not both installed");
        return Ok(());
    }
    let cases = corpus::all();
    let mut verdicts: BTreeMap<(&str, &str), String> = BTreeMap::new();
    for (name, program) in &found {
        let rival = start(name, program).await?;
        for case in &cases {
            verdicts.insert((&case.name, name), verdict(&rival, case).await.context(case.name.clone())?);
        }
    }
    let (mut unexplained, mut rows) = (Vec::new(), String::new());
    let mut explained: Vec<String> = Vec::new();
    for case in &cases {
        let theirs = ["nginx", "haproxy"].map(|name| verdicts[&(case.name.as_str(), name)].as_str());
        let we_pass = matches!(case.verdict, Verdict::Passed(_));
        let refused = theirs.iter().any(|verdict| !verdict.starts_with("passed"));
        if we_pass && refused && case.why.is_empty() {
            unexplained.push(format!("{}: {theirs:?}", case.name));
        }
        let we_refuse = matches!(case.verdict, Verdict::Refused(_) | Verdict::Closed);
        let they_pass = theirs.iter().any(|verdict| verdict.starts_with("passed"));
        // Cases with the same result everywhere need no row.
        if (we_pass && refused) || (we_refuse && they_pass) {
            let row = format!(
                "| {} | {} | {} | {} | {} |",
                case.name,
                ours(&case.verdict),
                theirs[0],
                theirs[1],
                case.why
            );
            let _infallible = writeln!(rows, "{row}");
            if we_pass {
                explained.push(row);
            }
        }
    }
    assert!(
        unexplained.is_empty(),
        "they refuse, we pass, and nothing says why:\n{}",
        unexplained.join("\n")
    );
    let versions = format!("nginx {}, haproxy {}", version(&found[0].1), version(&found[1].1));
    let table = format!(
        "{} requests; with {versions} these differ:\n\n| request | we | nginx | haproxy | why we pass it |\n|---|---|---|---|---|\n{rows}",
        cases.len()
    );
    let document = std::fs::read_to_string(DOCUMENT)?;
    let (_, rest) = document.split_once(BEGIN).context("no table in docs/testing.md")?;
    let (written, _) = rest.split_once(END).context("no end of the table in docs/testing.md")?;
    // Other versions may behave differently, and results may depend on their pace. Only rows with a reason
    // must match exactly.
    match explained.iter().find(|row| written.contains(&versions) && !written.contains(row.as_str())) {
        Some(row) => Err(Trouble::new(format!("docs/testing.md lacks `{row}`; the table now:\n{table}"))),
        None => Ok(()),
    }
}
