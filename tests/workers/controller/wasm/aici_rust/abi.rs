//! The guest's side of the AICI binary interface, without a crate: imports, JSON, the token trie.

#![allow(dead_code)]

use std::convert::TryInto;

pub type Token = u32;

mod host {
    #[link(wasm_import_module = "env")]
    extern "C" {
        pub fn aici_host_read_blob(blob: u32, dst: *mut u8, size: u32) -> u32;
        pub fn aici_host_token_trie() -> u32;
        pub fn aici_host_module_arg() -> u32;
        pub fn aici_host_process_arg() -> u32;
        pub fn aici_host_return_process_result(at: *const u8, size: u32);
        pub fn aici_host_return_logit_bias(at: *const u32);
        pub fn aici_host_tokenize(at: *const u8, size: u32) -> u32;
        pub fn aici_host_self_seq_id() -> u32;
        pub fn aici_host_eos_token() -> u32;
        pub fn aici_host_storage_cmd(at: *const u8, size: u32) -> u32;
        pub fn aici_host_stop();
    }
}

/// Reads a blob into a buffer of a guessed size, and again if the blob is larger.
fn read(blob: u32, guess: usize) -> Vec<u8> {
    let mut bytes = vec![0; guess];
    let size = unsafe { host::aici_host_read_blob(blob, bytes.as_mut_ptr(), guess as u32) } as usize;
    bytes.resize(size, 0);
    if size > guess {
        unsafe { host::aici_host_read_blob(blob, bytes.as_mut_ptr(), size as u32) };
    }
    bytes
}

pub fn module_arg() -> String {
    String::from_utf8(read(unsafe { host::aici_host_module_arg() }, 16)).expect("UTF-8")
}

/// The argument of the current call.
pub fn argument() -> Json {
    Json::parse(&read(unsafe { host::aici_host_process_arg() }, 256))
}

pub fn tokenize(text: &str) -> Vec<Token> {
    let blob = unsafe { host::aici_host_tokenize(text.as_ptr(), text.len() as u32) };
    words(&read(blob, 64))
}

pub fn self_seq_id() -> u32 {
    unsafe { host::aici_host_self_seq_id() }
}

pub fn eos_token() -> Token {
    unsafe { host::aici_host_eos_token() }
}

/// Makes a panic print its message and stop the guest.
pub fn stop_on_panic() {
    std::panic::set_hook(Box::new(|info| {
        println!("Panic: {}", info);
        unsafe { host::aici_host_stop() };
    }));
}

fn give(result: &str) {
    unsafe { host::aici_host_return_process_result(result.as_ptr(), result.len() as u32) };
}

fn words(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks_exact(4).map(|w| u32::from_le_bytes(w.try_into().unwrap())).collect()
}

// --- the four calls ------------------------------------------------------------------------------

pub enum Pre {
    Stop,
    Suspend,
    Append(Vec<Token>),
    Fork(usize),
}

pub enum Mid {
    Stop,
    Sample(Vec<u32>),
    SampleAny,
    Splice { backtrack: usize, tokens: Vec<Token> },
}

pub trait Controller {
    fn init_prompt(&mut self, prompt: Vec<Token>);
    fn pre_process(&mut self) -> Pre;
    fn mid_process(&mut self, fork_group: Vec<u32>) -> Mid;
    /// Returns whether the sequence stops.
    fn post_process(&mut self, tokens: Vec<Token>, backtrack: usize) -> bool;
}

pub fn init_prompt(controller: &mut impl Controller) {
    controller.init_prompt(argument().get("prompt").numbers());
    give("{}");
}

pub fn pre_process(controller: &mut impl Controller) {
    assert!(matches!(argument(), Json::Object(fields) if fields.is_empty()));
    let (masks, suspend, tokens) = match controller.pre_process() {
        Pre::Stop => (0, false, vec![]),
        Pre::Suspend => (1, true, vec![]),
        Pre::Append(tokens) => (1, false, tokens),
        Pre::Fork(count) => (count, false, vec![]),
    };
    let masks = vec!["[]"; masks].join(",");
    give(&format!(
        "{{\"attention_masks\":[{}],\"suspend\":{},\"ff_tokens\":{:?}}}",
        masks, suspend, tokens
    ));
}

pub fn mid_process(controller: &mut impl Controller) {
    match controller.mid_process(argument().get("fork_group").numbers()) {
        Mid::Stop => give("\"Stop\""),
        Mid::Sample(mask) => {
            unsafe { host::aici_host_return_logit_bias(mask.as_ptr()) };
            give("{\"SampleWithBias\":{}}");
        }
        Mid::SampleAny => give("{\"SampleWithBias\":{}}"),
        Mid::Splice { backtrack, tokens } => give(&format!(
            "{{\"Splice\":{{\"backtrack\":{},\"ff_tokens\":{:?}}}}}",
            backtrack, tokens
        )),
    }
}

pub fn post_process(controller: &mut impl Controller) {
    let argument = argument();
    let backtrack = argument.get("backtrack").number();
    let stop = controller.post_process(argument.get("tokens").numbers(), backtrack);
    give(&format!("{{\"stop\":{}}}", stop));
}

/// Exports the calls of a controller. Its handle is the address of a box, as in AICI.
#[macro_export]
macro_rules! export {
    ($kind:ty) => {
        #[no_mangle]
        pub extern "C" fn aici_init() {
            abi::stop_on_panic();
        }
        #[no_mangle]
        pub extern "C" fn aici_create() -> *mut $kind {
            Box::into_raw(Box::new(<$kind>::new(&abi::module_arg())))
        }
        #[no_mangle]
        pub unsafe extern "C" fn aici_init_prompt(controller: *mut $kind) {
            abi::init_prompt(&mut *controller);
        }
        #[no_mangle]
        pub unsafe extern "C" fn aici_pre_process(controller: *mut $kind) {
            abi::pre_process(&mut *controller);
        }
        #[no_mangle]
        pub unsafe extern "C" fn aici_mid_process(controller: *mut $kind) {
            abi::mid_process(&mut *controller);
        }
        #[no_mangle]
        pub unsafe extern "C" fn aici_post_process(controller: *mut $kind) {
            abi::post_process(&mut *controller);
        }
        #[no_mangle]
        pub extern "C" fn aici_panic() {
            panic!("aici_panic");
        }
        fn main() {}
    };
}

// --- variables -----------------------------------------------------------------------------------

fn storage(command: &str) -> Json {
    let blob = unsafe { host::aici_host_storage_cmd(command.as_ptr(), command.len() as u32) };
    Json::parse(&read(blob, 128))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{:02x}", b)).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    assert!(text.bytes().all(|c| matches!(c, b'0'..=b'9' | b'a'..=b'f')), "lowercase hex: {}", text);
    (0..text.len()).step_by(2).map(|i| u8::from_str_radix(&text[i..i + 2], 16).unwrap()).collect()
}

fn variable(answer: &Json) -> Option<(usize, Vec<u8>)> {
    match answer.field("ReadVar") {
        Some(read) => Some((read.get("version").number(), unhex(read.get("value").text()))),
        None => {
            answer.get("VariableMissing");
            None
        }
    }
}

/// The version and the value of a variable; None if it is not set.
pub fn get(name: &str) -> Option<(usize, Vec<u8>)> {
    variable(&storage(&format!("{{\"ReadVar\":{{\"name\":\"{}\"}}}}", name)))
}

/// The new version. If the version was not `when_version_is`, the current version and value.
pub fn write(
    name: &str,
    value: &[u8],
    op: &str,
    when_version_is: Option<usize>,
) -> Result<usize, Option<(usize, Vec<u8>)>> {
    let when = when_version_is.map_or("null".to_string(), |n| n.to_string());
    let answer = storage(&format!(
        "{{\"WriteVar\":{{\"name\":\"{}\",\"value\":\"{}\",\"op\":\"{}\",\"when_version_is\":{}}}}}",
        name,
        hex(value),
        op,
        when
    ));
    match answer.field("WriteVar") {
        Some(written) => Ok(written.get("version").number()),
        None => Err(variable(&answer)),
    }
}

// --- the token trie ------------------------------------------------------------------------------

const NO_TOKEN: u32 = 0xff_ffff;

pub struct TokTrie {
    nodes: Vec<(u32, u32)>,
    offsets: Vec<u32>,
    data: Vec<u8>,
    pub vocab_size: usize,
    pub eos: Token,
}

/// Decides which bytes may follow, with a stack of states.
pub trait Recognizer {
    fn try_push_byte(&mut self, byte: u8) -> bool;
    fn pop_bytes(&mut self, count: usize);
}

impl TokTrie {
    /// Reads the trie and checks its whole form.
    pub fn read() -> TokTrie {
        let bytes = read(unsafe { host::aici_host_token_trie() }, 0);
        let header = words(&bytes[..28]);
        assert_eq!(header[0], 0x558b_6fd3, "magic");
        assert_eq!(header[1], 28, "header size");
        let (nodes, offsets, data) = (header[2] as usize, header[3] as usize, header[4] as usize);
        assert_eq!(bytes.len(), 28 + nodes + offsets + data, "sizes");
        let trie = TokTrie {
            nodes: words(&bytes[28..28 + nodes]).chunks_exact(2).map(|n| (n[0], n[1])).collect(),
            offsets: words(&bytes[28 + nodes..28 + nodes + offsets]),
            data: bytes[28 + nodes + offsets..].to_vec(),
            vocab_size: header[5] as usize,
            eos: header[6],
        };
        assert_eq!(trie.offsets.len(), trie.vocab_size, "an offset for each token");
        trie.check();
        trie
    }

    pub fn token(&self, id: Token) -> &[u8] {
        let offset = self.offsets[id as usize];
        let (at, size) = ((offset >> 8) as usize, (offset & 0xff) as usize);
        &self.data[at..at + size]
    }

    pub fn nodes(&self) -> usize {
        self.nodes.len()
    }

    /// Checks that every id occurs once, at the node of its bytes, and that every subtree is inside
    /// its parent's.
    fn check(&self) {
        let mut used = vec![false; self.vocab_size];
        assert_eq!(self.nodes[0].0 & 0xff, 0xff, "the root's byte");
        assert_eq!(self.nodes[0].1, (self.nodes.len() as u32) << 8, "the root's subtree");
        let mut path = vec![];
        self.check_children(0, &mut path, &mut used);
        for id in 0..self.vocab_size {
            assert_eq!(used[id], !self.token(id as Token).is_empty(), "token {} in the trie", id);
        }
    }

    fn check_children(&self, parent: usize, path: &mut Vec<u8>, used: &mut [bool]) {
        let end = parent + (self.nodes[parent].1 >> 8) as usize;
        let above = self.nodes[parent].1 & 0xff;
        let (mut at, mut last) = (parent + 1, 0);
        while at < end {
            let (first, second) = self.nodes[at];
            let (id, byte) = (first >> 8, first as u8);
            let next = at + (second >> 8) as usize;
            assert!(at < next && next <= end, "the subtree of node {}", at);
            assert!(byte >= last, "the order of node {}", at);
            let parents = if next < end { 1 } else { above + 1 };
            assert_eq!(second & 0xff, parents, "levels that end with node {}", at);
            path.push(byte);
            if id != NO_TOKEN {
                assert!(!used[id as usize], "token {} twice", id);
                used[id as usize] = true;
                assert_eq!(self.token(id), &path[..], "the bytes of token {}", id);
            }
            self.check_children(at, path, used);
            path.pop();
            last = byte;
            at = next;
        }
    }

    /// The mask of the tokens whose bytes may all follow.
    pub fn compute_bias(&self, recognizer: &mut impl Recognizer) -> Vec<u32> {
        let mut mask = vec![0; (self.vocab_size + 31) / 32];
        let (mut at, mut pop) = (1, 0);
        while at < self.nodes.len() {
            let (first, second) = self.nodes[at];
            let (size, parents) = ((second >> 8) as usize, (second & 0xff) as usize);
            recognizer.pop_bytes(pop);
            if recognizer.try_push_byte(first as u8) {
                if first >> 8 != NO_TOKEN {
                    allow(&mut mask, first >> 8);
                }
                pop = if size == 1 { parents } else { 0 };
                at += 1;
            } else {
                pop = parents - 1;
                at += size;
            }
        }
        recognizer.pop_bytes(pop);
        mask
    }
}

pub fn allow(mask: &mut [u32], id: Token) {
    mask[id as usize / 32] |= 1 << (id % 32);
}

// --- JSON ----------------------------------------------------------------------------------------

#[derive(Debug)]
pub enum Json {
    Null,
    Bool(bool),
    Number(usize),
    Text(String),
    Array(Vec<Json>),
    Object(Vec<(String, Json)>),
}

impl Json {
    pub fn parse(text: &[u8]) -> Json {
        let mut parser = Parser { text, at: 0 };
        let value = parser.value();
        assert_eq!(parser.peek(), 0, "the end of {:?}", std::str::from_utf8(text));
        value
    }

    pub fn field(&self, name: &str) -> Option<&Json> {
        match self {
            Json::Object(fields) => fields.iter().find(|f| f.0 == name).map(|f| &f.1),
            _ => panic!("an object, not {:?}", self),
        }
    }

    pub fn get(&self, name: &str) -> &Json {
        self.field(name).unwrap_or_else(|| panic!("{} in {:?}", name, self))
    }

    pub fn number(&self) -> usize {
        match self {
            Json::Number(number) => *number,
            _ => panic!("a number, not {:?}", self),
        }
    }

    pub fn text(&self) -> &str {
        match self {
            Json::Text(text) => text,
            _ => panic!("a text, not {:?}", self),
        }
    }

    pub fn array(&self) -> &[Json] {
        match self {
            Json::Array(values) => values,
            _ => panic!("an array, not {:?}", self),
        }
    }

    pub fn numbers(&self) -> Vec<u32> {
        self.array().iter().map(|n| n.number() as u32).collect()
    }
}

struct Parser<'a> {
    text: &'a [u8],
    at: usize,
}

impl<'a> Parser<'a> {
    /// The next byte that is not a space; 0 at the end.
    fn peek(&mut self) -> u8 {
        while self.at < self.text.len() && self.text[self.at].is_ascii_whitespace() {
            self.at += 1;
        }
        self.text.get(self.at).copied().unwrap_or(0)
    }

    fn take(&mut self, byte: u8) -> bool {
        let found = self.peek() == byte;
        self.at += found as usize;
        found
    }

    fn word(&mut self, word: &str, value: Json) -> Json {
        assert!(self.text[self.at..].starts_with(word.as_bytes()), "{}", word);
        self.at += word.len();
        value
    }

    fn value(&mut self) -> Json {
        match self.peek() {
            b'{' => Json::Object(self.list(b'}', |p| {
                let name = p.string();
                assert!(p.take(b':'), "a colon");
                (name, p.value())
            })),
            b'[' => Json::Array(self.list(b']', |p| p.value())),
            b'"' => Json::Text(self.string()),
            b'n' => self.word("null", Json::Null),
            b't' => self.word("true", Json::Bool(true)),
            b'f' => self.word("false", Json::Bool(false)),
            _ => {
                let start = self.at;
                while self.at < self.text.len() && self.text[self.at].is_ascii_digit() {
                    self.at += 1;
                }
                let digits = std::str::from_utf8(&self.text[start..self.at]).unwrap();
                Json::Number(digits.parse().expect("a number"))
            }
        }
    }

    fn list<T>(&mut self, end: u8, mut item: impl FnMut(&mut Self) -> T) -> Vec<T> {
        self.at += 1;
        let mut items = vec![];
        if self.take(end) {
            return items;
        }
        loop {
            items.push(item(self));
            if self.take(end) {
                return items;
            }
            assert!(self.take(b','), "a comma");
        }
    }

    /// Reads a string, in which only escapes of one byte are supported.
    fn string(&mut self) -> String {
        assert!(self.take(b'"'), "a string");
        let mut bytes = vec![];
        loop {
            let byte = self.text[self.at];
            self.at += 1;
            match byte {
                b'"' => return String::from_utf8(bytes).expect("UTF-8"),
                b'\\' => {
                    bytes.push(self.text[self.at]);
                    self.at += 1;
                }
                _ => bytes.push(byte),
            }
        }
    }
}
