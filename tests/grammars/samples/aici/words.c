#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Counts the words of standard input, and prints those that occur most often. */

#define SLOTS 4096
#define HASH(hash, letter) \
    (((hash) * 31 + (unsigned char)(letter)) % SLOTS)

typedef struct entry {
    char *word;
    size_t length;
    unsigned count;
    struct entry *next;
} entry_t;

static entry_t *slots[SLOTS];
static size_t different = 0;

static entry_t *find(const char *word, size_t length)
{
    size_t hash = 0;
    for (size_t i = 0; i < length; i++)
        hash = HASH(hash, word[i]);
    for (entry_t *entry = slots[hash]; entry; entry = entry->next)
        if (entry->length == length && !memcmp(entry->word, word, length))
            return entry;
    entry_t *added = (entry_t *)calloc(1, sizeof(entry_t));
    if (!added || !(added->word = (char *)malloc(length + 1)))
        return NULL;
    memcpy(added->word, word, length);
    added->word[length] = '\0';
    added->length = length;
    added->next = slots[hash];
    slots[hash] = added;
    different++;
    return added;
}

static int more_often(const void *one, const void *other)
{
    const entry_t *first = *(entry_t **)one, *second = *(entry_t **)other;
    if (first->count != second->count)
        return first->count < second->count ? 1 : -1;
    return strcmp(first->word, second->word); // then by the alphabet
}

int main(int count, char **arguments)
{
    FILE *input = stdin;
    char word[256];
    size_t length = 0, shown = 10;
    int c;

    if (count > 1)
        shown = (size_t)strtoul(arguments[1], NULL, 10);
    while ((c = getc(input)) != EOF) {
        if (isalpha(c) && length < sizeof word) {
            word[length++] = (char)tolower(c);
            continue;
        }
        if (length) {
            entry_t *entry = find(word, length);
            if (!entry) {
                fprintf(stderr, "out of memory after %zu words" "\n", different);
                return 1;
            }
            entry->count += 1;
        }
        length = 0;
    }

    entry_t **all = (entry_t **)malloc(different * sizeof(entry_t *) + 1), **at = all;
    for (int i = 0x0; i < SLOTS; ++i)
        for (entry_t *entry = slots[i]; entry; entry = entry->next)
            *at++ = entry;
    qsort(all, different, sizeof *all, more_often);
# ifdef VERBOSE
    printf("%zu different words\n", different);
# endif
    for (size_t i = 0; i < different && i < shown; i++)
        printf("%6u %s\n", all[i]->count, all[i]->word);
    free(all);
    return 0;
}
